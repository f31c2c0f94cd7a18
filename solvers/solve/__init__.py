"""Tasks of one solve, side by side in processes or one after the other, with the same answer (docs/planning.md).

Why the answer does not depend on the number of workers nor on which of them is faster:

* A task is one planner's search in a session of its own, as if it were run alone. What it judges depends on nothing
  that is found meanwhile: whether a plan is tried with fewer micro-batches in flight depends on its memory only.
* The best value known anywhere is shared, and rules out only what is *proven* to take longer: a bound strictly above
  it. The best plan, and every plan that ties with it, is never ruled out.
* What tasks have found is put together in the order of the tasks, whoever was first: ties go by the session's key,
  then to the earlier task. When a prefix of the tasks is enough (gap or proof), the others are dropped, and what they
  have found is not used. With a gap above 0 or a number of plans, nothing is shared, and improvements are told in that
  order too.
* Rounds begin where the one before has ended: planners, neighbourhood search with closing, closing.

A time limit is the exception, as everywhere: then the best of all that was found counts, and ``unfinished`` names
whose search was cut off.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.judge`, `solvers.bounds`,
`solvers.schedules`, `solvers.improve`, `solvers.planners`, `solvers.lowering`, `solvers.verify`.
Start reading at `tasks.py`.
"""
