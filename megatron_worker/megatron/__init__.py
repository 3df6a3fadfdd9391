"""The Megatron engine: megatron-core's GPTModel behind the Engine interface, on CPU with gloo and on CUDA with NCCL."""

import logging
import warnings

# Said at import and at every layer of every model, of things that we do without on purpose.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed.*")
warnings.filterwarnings("ignore", message="full scope is deprecated.*")
warnings.filterwarnings("ignore", message="`torch.distributed..*_tensor` is deprecated.*", category=FutureWarning)
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
