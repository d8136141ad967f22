"""Pure rules: statistics, verdict, validity, evidence and roofline."""
