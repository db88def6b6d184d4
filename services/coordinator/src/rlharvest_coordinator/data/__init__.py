"""A job's inputs: prompts from files, generators and hubs, tokenised once; model directory and rewards checked.

`prepare` is the entry point, `reopen` the fast way after a restart.
"""

from rlharvest_coordinator.data.order import Order
from rlharvest_coordinator.data.prepare import Prepared, prepare, reopen
from rlharvest_coordinator.data.rows import Limits
from rlharvest_coordinator.data.store import TokenisedDataset
from rlharvest_coordinator.data.tokenizer import Tokenizer

__all__ = ["Limits", "Order", "Prepared", "TokenisedDataset", "Tokenizer", "prepare", "reopen"]
