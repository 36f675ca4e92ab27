"""Sockets: who may speak, ZeroMQ's protocol, and the lifelines."""
