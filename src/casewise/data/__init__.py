"""Cases and their labels: NIfTI, pictures, nnU-Net raw folders, the public datasets, the phantom, splits."""
