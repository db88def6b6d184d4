"""Generated from proto/rlharvest/v1 by `make proto`; do not edit."""
