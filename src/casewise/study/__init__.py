"""Studies: the masks that each method deploys, their gain and their cost. No torch.

``study.py`` has the data that every analysis reads. ``analyses/`` has one file for each analysis. An analysis takes a
:class:`casewise.study.study.Study` and returns a :class:`casewise.study.finding.Section`: sentences, tables, pictures,
and the findings (tidy tables at full precision) behind them. Undefined numbers are NaN, with the ``n`` and ``reason``
of their row. Shares are in [0, 1]. docs/reference/study-results.md has the conventions.

``statistics/``, ``trajectories.py`` and ``assignment.py`` are below the analyses; ``summary_text.py`` (first lines of a
report) and ``provenance.py`` (archives, policy, seeds, software) are above them. ``benchmark.py`` compares methods.
"""
