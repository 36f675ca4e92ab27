"""The ANCF codec: lossless storage of activations. FORMAT.md specifies every byte."""
