"""`stormd bench codec`: the codec on what autograd saves in real training steps.

Only tensors that an offloading client would send are counted: storages once, whole, without
parameters.
"""
