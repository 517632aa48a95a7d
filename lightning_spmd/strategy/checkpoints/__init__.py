"""Checkpoint files: written completely, checked when read.

``saving``       Lightning's hooks; ``state_dicts``: which state is saved; ``distributed``: a folder that all ranks fill
``whole_steps``  no checkpoint of half a step; ``whole_files``: no half-written files; ``intact``: checks of a file
``resumed_data`` the place in the data; ``folder_locks``: one run per folder
"""
