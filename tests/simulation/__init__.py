"""Simulates whole jobs, to the last message, from one seed: real servers and the code of real workers over a network, a
disk, a clock and a scheduler that are simulated.

    python -m tests.simulation --minutes 1       # as many seeds as there is time for
    python -m tests.simulation --seed 4711       # one of them again, told as a story

All processes of a job are groups of threads of this one, of which exactly one runs at a time. Whenever one waits, the
scheduler draws who goes on; when all wait, the clock jumps to the next thing that is due. So a seed is a run: its every
message, fault and turn.
"""
