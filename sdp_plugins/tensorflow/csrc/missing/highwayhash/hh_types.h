// Of a header that TensorFlow's package lacks; its other headers name nothing of this one.
#pragma once
