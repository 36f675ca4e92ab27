"""Sockets: who may connect, ZeroMQ's protocol, and the lifelines."""
