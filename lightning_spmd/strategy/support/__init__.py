"""The support matrix.

``matrix``     its rows; ``matrix_of_options``: rows of options; ``feature``: one row; ``detectors``: find features
``eager_semantics``, ``foreign_lightning``  how eager training differs; a second copy of Lightning
"""
