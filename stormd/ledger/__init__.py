"""The pure core: what sessions hold, and the effects of each event; no clock, socket or GPU."""
