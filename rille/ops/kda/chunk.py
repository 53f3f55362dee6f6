from rille.ops.kda.reference import kda

__all__ = ["kda"]
