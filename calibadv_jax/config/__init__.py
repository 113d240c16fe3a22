"""Every YAML key, typed and documented: a dataclass a section, checked by pydantic."""

from calibadv_jax.config.keys import hint_for_key, known_keys
from calibadv_jax.config.load import dump_config, load_config, parse_config
from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.credit import AdvantageConfig, JudgeConfig, RewardConfig
from calibadv_jax.config.sections.data import ColumnsConfig, DataConfig, PromptConfig, WorldConfig
from calibadv_jax.config.sections.learner import (
    Aggregation,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    OptimizerConfig,
    SftConfig,
    SftPhase,
)
from calibadv_jax.config.sections.policy import DistributedConfig, LoraConfig, MeshConfig, PolicyConfig
from calibadv_jax.config.sections.retriever import RetrieverConfig
from calibadv_jax.config.sections.rollout import (
    ContinuationsConfig,
    DemonstrationsConfig,
    McpConfig,
    RolloutConfig,
    SamplerConfig,
    ToolCallsConfig,
    ToolConfig,
)
from calibadv_jax.config.sections.run import (
    CheckpointConfig,
    EvaluateConfig,
    ExportConfig,
    GuardsConfig,
    LogConfig,
    RunConfig,
)
from calibadv_jax.config.sections.teacher import TeacherConfig
