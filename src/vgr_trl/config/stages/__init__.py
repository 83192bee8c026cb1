"""The options of each stage.

Read them in the order of data: `noisy.py`, `blind.py`, `measure.py`, `perceive.py`, `choose.py`, `kl.py`, `critic.py`,
`credit.py`, `skip.py`, `report.py`, `evaluate.py`.
"""
