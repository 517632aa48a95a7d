"""The command line: ``lightning-spmd fit --config gpt_bytes``.

``main``            the command and its subcommands; ``compare``, ``plan``, ``measured``: those of this package
``recipe_cli``      LightningCLI as all subcommands use it
``recipe_names``    recipes of this package by name; ``own_modules``: the user's modules beside a recipe

Mistakes, each reported in one line with the fix, in the order in which they are found:

``recipe_files``      the recipe as a file; ``broken_modules``: a user's file that Python cannot import
``one_line``          a key or value that jsonargparse refuses
``trainer_values``    numbers that make no sense
``first_steps``       a missing folder, a model that does not fit its data or checkpoint
``encodings``         terminals that are not UTF-8
"""
