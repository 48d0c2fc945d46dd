/* A stand-in for libnvidia-ml.so.1: FAKE_GPUS GPUs without a driver. It can't show that NVML's order of GPUs is CUDA's.
   FAKE_GPU_PID is the one process on each GPU; the default is none that exists here, as in a container. */
#include <string.h>
#include <stdlib.h>
#include <stdio.h>
static int n(void){const char*e=getenv("FAKE_GPUS");return e?atoi(e):0;}
#define F int
F nvmlInit_v2(void){return n()?0:9;} F nvmlInitWithFlags(unsigned f){return nvmlInit_v2();} F nvmlShutdown(void){return 0;}
const char*nvmlErrorString(int r){return r==9?"Driver Not Loaded":"fake error";}
F nvmlDeviceGetCount_v2(unsigned*c){*c=n();return 0;}
F nvmlDeviceGetHandleByIndex_v2(unsigned i,void**h){if((int)i>=n())return 2;*h=(void*)(long)(i+1);return 0;}
F nvmlDeviceGetHandleByUUID(const char*u,void**h){for(int i=0;i<n();i++){char b[64];snprintf(b,64,"GPU-00000000-0000-0000-0000-%012d",i);if(!strcmp(u,b)){*h=(void*)(long)(i+1);return 0;}}return 6;}
F nvmlDeviceGetName(void*h,char*b,unsigned l){snprintf(b,l,"FAKE H100 %ld",(long)h-1);return 0;}
typedef struct{unsigned long long t,f,u;}M; F nvmlDeviceGetMemoryInfo(void*h,M*m){m->t=80ULL<<30;m->u=3ULL<<29;m->f=m->t-m->u;return 0;}
typedef struct{unsigned v;unsigned long long t,r,f,u;}M2; F nvmlDeviceGetMemoryInfo_v2(void*h,M2*m){m->t=80ULL<<30;m->r=1ULL<<29;m->u=1ULL<<30;m->f=m->t-m->r-m->u;return 0;}
typedef struct{unsigned g,m;}U; F nvmlDeviceGetUtilizationRates(void*h,U*u){u->g=10*(long)h;u->m=1;return 0;}
F nvmlDeviceGetPowerUsage(void*h,unsigned*p){*p=100000;return 0;}
F nvmlDeviceGetCurrentClocksThrottleReasons(void*h,unsigned long long*r){*r=4;return 0;}
F nvmlDeviceGetTemperature(void*h,int s,unsigned*t){*t=40;return 0;}
F nvmlDeviceGetTotalEccErrors(void*h,int a,int b,unsigned long long*c){*c=0;return 0;}
F nvmlDeviceGetComputeRunningProcesses_v3(void*h,unsigned*c,void*i){ /* host pid, as seen from a container */
 if(*c==0){*c=1;return 7;} memset(i,0,24); const char*e=getenv("FAKE_GPU_PID");*(unsigned*)i=e?atoi(e):999999; *c=1; return 0;}
F nvmlSystemGetDriverVersion(char*b,unsigned l){snprintf(b,l,"999.1");return 0;}
F nvmlSystemGetCudaDriverVersion_v2(int*v){*v=13000;return 0;}

F nvmlDeviceGetUUID(void*h,char*b,unsigned l){snprintf(b,l,"GPU-00000000-0000-0000-0000-%012ld",(long)h-1);return 0;}
F nvmlDeviceGetMigMode(void*h,unsigned*c,unsigned*p){*c=*p=getenv("FAKE_MIG")!=0;return 0;}
