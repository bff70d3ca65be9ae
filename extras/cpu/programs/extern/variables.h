extern __constant__ float weights[4];
extern __device__ int blocks;
void weigh(float *y, const float *x);
