"""Files: written whole, read intact.

``saving``       Lightning's hooks; ``state_dicts``: what of state is saved; ``distributed``: a folder of all ranks
``whole_steps``  no half steps; ``whole_files``: no half files; ``intact``: is a file what was written
``resumed_data`` the place in the data; ``folder_locks``: one run a folder
"""
