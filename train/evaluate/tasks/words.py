"""Short common words."""

NOUNS = (
    "anchor", "basket", "beacon", "blanket", "bottle", "bucket", "button", "cabin", "camel", "candle", "canyon",
    "castle", "cellar", "cherry", "copper", "cotton", "cradle", "desert", "donkey", "eagle", "engine", "falcon",
    "feather", "fiddle", "forest", "funnel", "garden", "ginger", "guitar", "hammer", "harvest", "helmet", "island",
    "jacket", "jungle", "kettle", "ladder", "lantern", "lemon", "lizard", "magnet", "marble", "meadow", "mirror",
    "monkey", "mountain", "muffin", "needle", "onion", "orchid", "oyster", "paddle", "pebble", "pencil", "pepper",
    "pigeon", "pillow", "planet", "pocket", "pony", "puzzle", "rabbit", "ribbon", "rocket", "saddle", "salmon",
    "shadow", "shovel", "spider", "spoon", "squirrel", "statue", "summer", "tailor", "temple", "thunder", "ticket",
    "tiger", "tunnel", "turtle", "valley", "velvet", "violin", "wagon", "walnut", "whistle", "willow", "window",
    "winter", "yogurt", "zebra",
)  # fmt: skip
