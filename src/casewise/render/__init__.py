"""The look of numbers and pictures: cells, tables, figures, painted masks. Knows no analysis and no page."""
