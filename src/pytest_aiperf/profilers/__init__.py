"""Run a claim's calls under a profiler, and read the profiler's reports."""
