"""The support matrix.

``matrix``     its rows; ``matrix_of_options``: those of options; ``feature``: one row; ``detectors``: how it is noticed
``eager_semantics``, ``foreign_lightning``  what eager training is not; a second copy of Lightning
"""
