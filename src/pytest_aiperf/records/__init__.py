"""Records on disk: journals, results and expectations."""
