"""The words of nicknames. Never reorder: a peer keeps its name."""

ADJECTIVES = (
    "able", "agile", "amber", "ample", "apt", "arctic", "autumn", "bold", "brave", "breezy", "bright", "brisk", "calm",
    "candid", "cheery", "civil", "clever", "cosmic", "cosy", "crisp", "curious", "daring", "deft", "eager", "early",
    "earnest", "fair", "fancy", "fleet", "fluent", "fond", "frank", "fresh", "gentle", "glad", "golden", "grand",
    "hardy", "honest", "humble", "jolly", "keen", "kind", "lively", "loyal", "lucid", "lucky", "mellow", "merry",
    "mighty", "modest", "neat", "nimble", "noble", "patient", "placid", "plucky", "polite", "proud", "quick", "quiet",
    "ready", "robust", "rosy",
)  # fmt: skip

ANIMALS = (
    "ant", "badger", "bat", "bear", "beaver", "bee", "bison", "bobcat", "camel", "cat", "condor", "coyote", "crab",
    "crane", "cricket", "crow", "deer", "dingo", "dolphin", "dove", "duck", "eagle", "eel", "elk", "falcon", "ferret",
    "finch", "fox", "frog", "gecko", "gibbon", "goat", "horse", "ibex", "jackal", "jay", "koala", "lark", "lemur",
    "lion", "llama", "lynx", "magpie", "marten", "mole", "moose", "moth", "newt", "ocelot", "orca", "otter", "owl",
    "panda", "puffin", "raven", "robin", "seal", "stork", "swan", "tiger", "wombat", "wren", "yak", "zebra",
)  # fmt: skip
