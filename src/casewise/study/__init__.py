"""Was it wise?  One analysis, one file: pure functions over tidy tables (numpy, scipy, pandas), no torch, no printing.

**What goes in.** ``outcomes``: one row per (case, step, shrink), as :func:`casewise.judge.outcomes.outcomes` gives it.
``methods``: ``{name: deployed frame}`` in the order of the table, each one row per case, as
:func:`casewise.judge.outcomes.deployed` gives it. ``router``: the deployed frame of a router (it has buckets).
``arms``: ``{"low": frame, "mid": frame, "hard": frame}``, the deployed frames had *every* case gone to that bucket.

**What comes out.** Every analysis returns a :class:`casewise.study.finding.Finding`: ``name`` (stable key), ``table``
(tidy DataFrame), ``n`` (cases it rests on), ``spec`` (ids), ``made`` (options, seed, stream proof), ``notes``
(sentences for a person), ``reason`` (why it is undefined; "" when it is not). Undefined numbers are NaN, with the
``n`` and the ``reason`` column of their row; what was not run is not in the table. Shares are in [0, 1], never percent.

===============  =====================================================================================================
file             functions -> columns of ``.table``
===============  =====================================================================================================
budget.py        ladder(outcomes, *, by_group=False) -> group, step, n, metric, ha, ba, delta, regions, scored,
                   is_best  (G1)
                 selection(holdout, evaluation) -> rule, k_holdout, k_best, ha_holdout, ha_eval, ha_best,
                   metric_eval, regret, n_holdout, n_eval  (G2, G3; first row is argmin HA)
                 selection_stability(holdout, evaluation, *, resamples=5000, seed=1000) -> rule, kind ("holdout",
                   "evaluation", "joint"), k_holdout, k_eval, probability;  notes name the modal pair  (G4)
                 selection_agreement(holdout, evaluation, *, ...) -> rule, agree, modal_holdout, modal_eval,
                   modal_share  (G4)
                 group_agreement(holdout, evaluation) -> group, n_holdout, n_eval, k_holdout, k_eval, agree  (G5)
                 ladder_shape(outcomes, *, by_group=False) -> group, n, k_best, ha_first, ha_best, ha_last,
                   non_monotone, dips, metric_spread  (G6, G7)
                 learning_rate_sweep(stopped, fixed) [both {rate: deployed frame}] -> learning_rate, n, stop_metric,
                   stop_ha, fixed_metric, fixed_ha, ha_cut, steps  (G8)
                 oracle_plateau(outcomes, *, epsilon=0.002) -> case, k_best, k_first, width, metric  (S23)
micro.py         micro_ladder(archive, *, by_group=False) -> group, step, n, micro_miou  (A11; reads masks and labels)
deployment.py    method_table(methods) -> method, n, undefined, metric, ha, ba, neutral_scored, unscored, steps,
                   executed, rolled_back, best_metric, best_ha  (H, A12)
                 tiers(methods, *, ours, deployable=None, default=None, retrospective=None) -> list[Comparison]
                   (H2)
                 intervals(methods, comparisons, *, resamples=5000, seed=1000, method="percentile", cluster="auto")
                   -> id, tier, method, reference, quantity ("ha", "metric"), estimate, low, high, p_below, n,
                   clusters, separated, p_flip, shown, matched, below_scale, wins, ties, losses, wilcoxon,
                   wilcoxon_p, family, holm_p, interval, corrected, reason  (H1-H9, H12)
                 bucket_decomposition(router) -> bucket, n, mean_change, contribution, reason; last row "all"  (H10)
association.py   association(outcomes, *, signals=None, by_group=False, differences=True, max_step=None,
                   resamples=5000, ...) -> scope ("all" or a group), kind ("level", "difference"), signal, rho, low,
                   high, p, rows, n, clusters, skipped, against (sign opposite to the signal's orientation),
                   backwards, step, reason  (I1-I3, I5, I6, I9)
                 per_step(outcomes, *, ...) -> step (int as str, or "pooled"), then as above  (I4)
                 signal_signal(outcomes, *, signals=None) -> first, second, rho, rows, n, reason  (I7)
                 signal_summary(association_finding) -> signal, rho, rho_difference, backwards, forwards  (I10)
ranking.py       auroc_table(outcomes, *, signals=None, budget=None, step=1, ...) -> signal, target ("worse",
                   "harm"), auroc, low, high, positives, n, skipped, threshold, reason  (I8)
assignment.py    arms_of(archive, router controller, outcomes) -> {bucket: deployed frame}
                 arms_at(outcomes, {bucket: State}) -> same
                 selector_scores(outcomes, *, coordinate, step=1, budget=None) -> DataFrame by case, one column a
                   selector, high = risky ("router (delta)", signals, "oracle HA", "oracle metric")  (J3)
controls.py      check_licence(arms, router) raises Refused when the arms do not reproduce the deployed row  (J1)
                 matched_controls(arms, router, scores, *, by_group=False, draws=1000, seed=1000, weighting="plain",
                   substitute=False) -> scope, selector, n, hard, mid, low, metric, ha, steps, p_random,
                   p_random_corrected, overlap_hard, faithful  (J1-J4, J6, J7; rows "deployed", selectors, "random",
                   "m0")
                 random_control(arms, router, *, by_group=False, draws=1000, seed=1000) -> scope, quantity,
                   mean_exact, sd_chance, mean_draws, low, high, deployed, z, p_normal, p_draws, p_draws_corrected, n
                   (J4, P1)
                 selector_intervals(arms, router, scores, *, against) -> selector, against, quantity, estimate, low,
                   high, p_below, n, separated, p_flip, shown  (J5)
                 overlap(arms, router, scores) -> first, second, shared, hard  (J6)
                 attribution(arms, router, reference, scores=None) -> control, ha_reference, ha_control, ha_router,
                   share, sentence, n, reason  (P2, J11; row "random" is exact)
                 substitution(arms, router, values, *, cut_low, cut_high) -> kind ("matched", "native"), n, hard,
                   mid, low, metric, ha, ba, steps  (J9)
sensitivity.py   calibration_sensitivity(calibration_values, evaluation_values, arms, *, reference, sizes=(5, 10,
                   15), draws=500, percentiles=(33.33, 66.67), vary="both"|"high", cuts=None) -> cases, draws, metric,
                   metric_low, metric_high, ha, ha_low, ha_high, ha_worst, beats_reference, n; first row (cases = all)
                   is the deployed one  (K)
                 cut_stability(calibration_values, evaluation_values, *, ...) -> cut, estimate, low, high, n  and
                   notes; made["changed_median"], made["changed_high"] are shares of evaluation cases  (F9)
sweep.py         sweep_outcomes(archive, *, min_areas=(8, 16, 32, 64), connectivities=("face",),
                   unit="voxels") -> DataFrame case, step, shrink, min_area, connectivity, ha, ba, regions, delta,
                   area  (reads masks and labels)
                 min_area_sweep(sweep, methods, *, router, reference) -> connectivity, min_area, method, ha, scored,
                   n, rank, difference (router - reference)  (N1, N3)
                 rank_invariance(sweep_finding) -> connectivity, method, ranks, invariant  (N2)
helphurt.py      help_hurt(methods) -> method, n, undefined, helped, hurt, rolled_back, unchanged, share_helped,
                   share_hurt, share_rolled_back, share_unchanged, mean_helped, mean_hurt, mean_change  (M1)
                 weaker_source(router) -> side ("rolled back", "kept"), n, metric_source, reason  (M2)
                 net_helped(router) -> n, helped, hurt, go, reason  (M3, on the labelled holdout)
accounting.py    accounting(methods, *, buckets_of=()) -> method, bucket, n, ha, ba, ratio, scored, ha_within,
                   retained, ha_retained, coverage, reason  (M4, B10-B12)
geometry.py      region_features(archive, *, step=None, min_area=None, foreground=None) -> DataFrame case, region,
                   side ("harmful", "beneficial", "neutral"), area, compactness, distance, fraction
                   region_geometry(features, *, small=(0.02, 0.05, 0.10)) -> feature, harmful, beneficial,
                   mean_harmful, mean_beneficial, u, p, cliff_d, reason  (M5-M8)
distance.py      distances(archive, *, step=None) -> DataFrame case, hd95_source, hd95, empty
                   harm_and_distance(outcomes, distances, *, step=None) -> pairing ("HA, HD95", "HA, change of HD95",
                   "both move"), rho, p, n, reason;  made has mean_change, median_change, zero_ha, unmoved, both_move,
                   excluded  (M9, M10)
dispersion.py    depth_dispersion(router) -> bucket, n, std, low, high, reason  (M11)
cost.py          cost(methods) -> method, n, deployed, executed, wasted
                 firing(outcomes, *, mean_regions, sd_regions, mean_delta, sd_delta) -> n, rows, fired, share,
                   lowest, floor
                 signal_costs(milliseconds=None) -> signal, forwards, backwards, milliseconds  (M12, C13)
                 step_seconds({case: seconds of M0 and of each update}) -> part ("m0", "update"), n, steps, mean,
                   median, slowest  (C13)
alignment.py     alignment(first, second, *, runs=("first", "second")) -> layer, step, difference, relative, limit,
                   passed, gated, n  (N4)
                 harm_moves(first, second) -> case, step, change, cause; made has the cohort difference with and
                   without them  (N5)
                 shared_signals(first, second) -> signal, rho_first, rho_second, difference, agrees  (N6, N7)
frozen.py        frozen_differences(original, refit) -> list[str] of what else than cut-points changed  (E14)
                 frozen_design(methods, *, router, reference) -> method, n, metric, ha, ba, steps, retained,
                   coverage, cut, low, high, relative  (O1, O2)
prereg.py        declare(path, criteria, *, declared_at), read_criteria(path) -> Declaration; PAPER_CRITERIA (V0-V4
                   and J10)
                 reconcile(declaration, facts, *, results_at=None, event, needs) -> id, expectation, quantity,
                   observed, verdict ("held", "failed", "unresolved", "reported", "not run"), low, high, n,
                   reason  (J10, O6-O10)
coherence.py     coherence(outcomes_by_backbone, *, source_metric=None, band=(0.60, 0.80), step=None) -> backbone,
                   n, in_band, metric_source, usable, largest, singleton_share, rho_regions, rho_delta, meets, reason
                   (O4, O5)
scale.py         scale_probe(home, away, *, coordinate="delta", cut_high=None, step=1) -> cohort, n, mean, median,
                   ratio_mean, ratio_median, rolled_back  (O13)
early.py         early_segment(outcomes, methods, *, stop, reference) -> row ("M0", "fixed-1", ..., stop, "oracle
                   stop"), n, metric, ha, steps;  made has worth_keeping, cut, low, high  (O12)
search.py        design_search(design, calibration, evaluation, *, designs=None, resamples=2000, seed=1000) ->
                   design, chosen, score_design, score_evaluation, metric, ha, rolled_back, n, reason;  made has best,
                   optimism, optimism_low, optimism_high, best_kept, null_mean, null_p, best_score  (S8, S13, S22)
learned.py       learned_policy(outcomes, *, features=..., weight=1.0, folds=5, seed=1000, router=None) -> policy
                   ("learned", "router", "random at its quota", "M0", "fixed-K"), n, loss, metric, ha, rolled_back;
                   made has estimate, low, high (learned - router), verdict, constant, z_chance, p_chance  (S5)
balance.py       label_free_balance(holdout, stream, *, features=..., step=None) -> quantity ("prediction-powered",
                   "quantified", "holdout"), estimate, low, high, n_holdout, n_stream, reason;  made has identifiable,
                   tpr, fpr, gap, gap_low  (S3)
classes.py       class_edits(binarized, raw) [outcomes with foreground=True and False] -> step, n, ha, ha_raw, ba,
                   ba_raw, hidden_cases, hidden_share  (S25)
audit.py         audit(methods, *, deployment=None, accounting=None, helphurt=None, decomposition=None,
                   intervals=None) -> list[Disagreement]; check_audit(same) raises Refused  (P3, Q5-Q11, Q14)
===============  =====================================================================================================

Shared by all: ``finding.py`` (the result), ``resample.py`` (the bootstrap: one index matrix, A8), ``ranks.py`` (exact
weighted average ranks), ``pairs.py`` (wins, Wilcoxon, Holm), ``chance.py`` (random assignment in closed form),
``trajectories.py`` (``labelled``: drop unlabelled cases first; ``deployed_at(outcomes, State)``: a fixed state as a
deployed frame). ``oracles.py``: per-case best states.
"""
