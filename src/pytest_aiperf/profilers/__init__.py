"""One call under a profiler, and what its reports say."""
