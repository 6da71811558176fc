"""Advice: what would make a plan faster, and what would make one fit.

`changes` lists what may be changed, `answer` asks again with a change, and `infeasible` adds to the error of a search
without a plan what would suffice.
"""
