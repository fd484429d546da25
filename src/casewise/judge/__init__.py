"""Chooses: controllers, calibration, certificates, monitors. Only calibration and outcomes ever see a label."""
