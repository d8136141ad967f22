"""Run calls under a profiler, and read its reports."""
