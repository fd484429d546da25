"""Learning from labelled cases: the only part that holds labels and gradients together.

``tune`` continues the training of a frozen network for a short schedule; ``cross_fit`` does so once for each fold of
the patients, so that every labelled case can be judged with weights that never saw its patient. The results are files
that ``casewise.adapt.proposers.tuned`` reads as candidates; nothing that adapts or decides imports this package.
"""
