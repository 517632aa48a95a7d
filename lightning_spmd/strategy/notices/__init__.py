"""What a run says.

``start_table``  how it trains; ``builds``, ``build_progress``: while graphs are built; ``run_account``: in the end
``advice``       what to do about torch's errors; ``step_statistics``: a callback for loggers
"""
