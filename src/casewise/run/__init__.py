"""Many cases: record and predict, on this machine or another engine; one bad case fails alone."""
