"""Was it wise?  ``study.py`` holds what every analysis reads; ``analyses/`` is one file per analysis; no torch.

**What goes into an analysis.** A :class:`casewise.study.study.Study`. Its ``outcomes``: one row per (case, step,
shrink). Its ``methods``: ``{name: deployed frame}`` in the order of the tables, each one row per case. Its ``router``:
the deployed frame of the policy (with buckets where it is a router). Its ``arms``: ``{"low": frame, "mid": frame,
"hard": frame}``, the deployed frames had *every* case gone to that bucket.

**What comes out.** A :class:`casewise.study.finding.Section` with tables, pictures and sentences, and behind it
:class:`casewise.study.finding.Finding` records: ``name`` (stable key), ``table`` (tidy DataFrame), ``n`` (cases that it
rests on), ``made`` (options, seed, proof of the random stream), ``notes`` (sentences), ``reason`` (why it is
undefined). Undefined numbers are NaN, with the ``n`` and the ``reason`` of their row; what was not run is not in the
table. Shares are in [0, 1], never percent. docs/reference/analyses.md lists the columns of every finding.

**Below the analyses.** ``statistics/`` (resampling by cluster, ranks, paired tests, chance, folds, small models),
``trajectories.py`` (views of the outcomes), ``assignment.py`` (routers, quotas, arms), ``oracles.py`` (best states,
which need labels). **Above them.** ``story.py`` (how a report opens), ``inventory.py`` (the paper's tables and
figures), ``provenance.py`` (where numbers come from), ``audit.py`` (sums that must hold).
"""
