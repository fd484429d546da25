"""What needs a label: harm, overlap, surface distances, and the table of what each gives for empty masks."""
