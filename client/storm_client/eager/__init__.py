"""Plans of eager steps: recorded, recognised by their signature, recomputed, and controlled."""
