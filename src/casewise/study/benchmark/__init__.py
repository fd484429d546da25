"""A benchmark of decisions: fitted on calibration cases, taken without evaluation labels, sealed, then scored once.

The order is the point. ``decisions.decide_all`` sees calibration labels and an evaluation archive that holds none.
``decisions.seal`` writes every decision and its hash into the ledger of the evaluation archive. Only then does
``case_scores.opened`` open the evaluation labels, which is the next line of the same ledger, and ``case_scores.scored``
reads them. The result (``result.py``) is one value of plain JSON types that ``check.py`` checks and ``leaderboard.py``
compares.
"""
