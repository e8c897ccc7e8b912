"""Kernels of our own for the CPU: a step's layers in one call, in C++ compiled where they run.

``build`` compiles the sources beside this file, once a machine; ``library`` calls what they hold;
``weights`` lays a model's weights out for them.
"""
