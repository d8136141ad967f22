"""What this machine has, who may use which GPU now, and processes that end when they must."""
