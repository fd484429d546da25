"""How numbers and pictures look: cells, tables, figures, painted masks. Knows no analysis and no page."""
