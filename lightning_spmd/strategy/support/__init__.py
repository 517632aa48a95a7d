"""The support matrix.

``matrix``     its rows; ``feature``: one row; ``detectors``: find features
``eager_semantics``, ``foreign_lightning``  how eager training differs; a second copy of Lightning
"""
