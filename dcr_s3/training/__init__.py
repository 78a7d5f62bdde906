"""Publishing from a trainer: every rank scans and sends what it owns; nothing is gathered."""

from dcr_s3.mapping.group import Group
from dcr_s3.mapping.model import plain_name, shards_of
from dcr_s3.mapping.part import Part, Shard
from dcr_s3.mapping.residual import Residual
from dcr_s3.mapping.view import View
from dcr_s3.training.publisher import Publisher

__all__ = ["Group", "Part", "Publisher", "Residual", "Shard", "View", "plain_name", "shards_of"]
