"""Runs in an environment of SageMaker's SDK 3: what a ModelTrainer sends, without AWS.

    python sdk3.py FOLDER SOURCE JSON

leaves in FOLDER the channels that a container would find, and prints the job's request in part.
JSON has the ModelTrainer's hyperparameters and SMDDP's settings.
"""

import json
import shutil
import sys
from pathlib import Path
from unittest import mock

from sagemaker.core.helper.session_helper import Session
from sagemaker.core.training.configs import Compute, SourceCode
from sagemaker.train.defaults import TrainDefaults
from sagemaker.train.model_trainer import ModelTrainer

from sdp_plugins.sagemaker.model_trainer import SMDDP

folder, source = Path(sys.argv[1]), sys.argv[2]
settings = json.loads(sys.argv[3])
ROLE = "arn:aws:iam::123456789012:role/role"


def keep(_trainer, channel_name, data_source, **_options):
    """In place of an upload to S3."""
    shutil.copytree(data_source, folder / channel_name)
    return channel_name


session = mock.MagicMock(spec=Session)
session.boto_region_name = "us-east-1"
session.default_bucket.return_value = "bucket"
session.default_bucket_prefix = None
mock.patch.object(TrainDefaults, "get_role", return_value=ROLE).start()  # it would ask AWS
mock.patch.object(TrainDefaults, "get_sagemaker_session", return_value=session).start()
trainer = ModelTrainer(
    training_image="me/mine:1",
    role=ROLE,
    sagemaker_session=session,
    base_job_name="job",
    compute=Compute(instance_type="ml.c5.xlarge", instance_count=settings["hosts"]),
    source_code=SourceCode(source_dir=source, entry_script=settings["script"]),
    hyperparameters=settings["hyperparameters"],
    distributed=SMDDP(**settings["distributed"]),
)
with mock.patch.object(ModelTrainer, "create_input_data_channel", keep):
    request = trainer._create_training_job_args()
algorithm = request["algorithm_specification"]
said = {
    "command": [*algorithm.container_entrypoint, *algorithm.container_arguments],
    "hyperparameters": request["hyper_parameters"],
}
print(json.dumps(said))
