"""The names of `sophon.sail` that drivers of EngineLLM use, so that one needs another import and no other change.

>>> import penstock_client.compat.sail as sail
>>> engine = sail.EngineLLM("127.0.0.1:50052", [0])
"""

from penstock_client.compat.sail.engine_llm import EngineLLM
from penstock_client.compat.sail.graph_values import BmrtFlag, Dtype
from penstock_client.compat.sail.log_level import LogLevel, set_loglevel
from penstock_client.compat.sail.server_tensor import ServerTensor
from penstock_client.compat.sail.tensor import Handle, Tensor

__all__ = ["BmrtFlag", "Dtype", "EngineLLM", "Handle", "LogLevel", "ServerTensor", "Tensor", "set_loglevel"]
