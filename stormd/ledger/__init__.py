"""The pure core: what sessions hold, and what follows from each event; no clock, socket or GPU."""
