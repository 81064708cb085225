"""Why a node is alone or cannot be reached: some modules collect the facts, a pure one explains them."""
