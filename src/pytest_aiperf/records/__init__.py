"""Records on disk: journals, results, expectations and history."""
