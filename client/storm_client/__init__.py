"""Offloads the activations of a training script to stormd."""
