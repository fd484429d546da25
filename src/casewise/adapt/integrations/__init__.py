"""casewise inside other people's training loops: harmful area as a metric of torchmetrics and of MONAI."""
