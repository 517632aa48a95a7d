"""Messages of a run.

``start_table``  how it trains; ``builds``, ``build_progress``: while graphs are built; ``run_account``: at the end
``advice``       advice for torch's errors; ``step_statistics``: a callback for loggers
"""
