// </script><b>100%</b> <!-- is no HTML here
// Its error has characters that make show's page must not take for its own.
#include "yours.h"

YOURS(tags) {
    (void)grads;
    error("</script><b>100%%</b> <!-- is no HTML here");
}
