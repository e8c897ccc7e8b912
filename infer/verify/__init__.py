"""Evidence that the engine computes what it should, on the machine and the model at hand.

The same tokens are fed along fixed paths through the engine in many ways, and through transformers;
logits, tokens and the amount of work are compared. ``checks`` has one function a comparison.
"""

from __future__ import annotations
