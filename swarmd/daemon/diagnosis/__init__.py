"""Why a node is alone or cannot be reached: the facts are collected, and a pure part says what they mean."""
